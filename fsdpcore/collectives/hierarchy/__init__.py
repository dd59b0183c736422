"""Two levels: ranks on several hosts, of which each shares memory inside."""
