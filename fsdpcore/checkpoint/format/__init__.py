"""The bytes of a checkpoint: headers, metadata, markers; written, and read with every check."""
