"""What a rank does and did, and why an operation waits: status, flight recorder, deadlocks."""
