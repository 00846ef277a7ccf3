"""Training the drafter in one process: loop, step, optimizer, schedule, checkpoint. Knows no other process."""
