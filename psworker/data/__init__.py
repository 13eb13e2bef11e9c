"""What loaders read: map-style data sets, their order, and the options of torch's DataLoader."""
