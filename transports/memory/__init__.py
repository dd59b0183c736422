"""How processes of one host share memory."""
