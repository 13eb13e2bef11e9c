"""Pure values and decisions: no clock, thread, socket, file, log or random number in here."""
