"""Loading: find, plan, read, verify, pass on."""
