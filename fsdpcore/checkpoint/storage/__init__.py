"""Where checkpoints are kept: stores, the steps in one, and how steps go away."""
