"""PyTorch's distributed checkpoints, ``.metadata`` and ``.distcp``, read without PyTorch."""
