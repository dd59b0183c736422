"""Who writes and who reads which bytes. Pure: no files, no communication."""
