"""What ``fsdpcore run`` does: a script on the ranks of this host, and of others."""
