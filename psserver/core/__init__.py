"""The servers' decisions as pure machines: `step(event, now) -> effects`."""
