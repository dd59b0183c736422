"""What a rank can do: messages, groups of ranks, and the base that transports derive from."""
