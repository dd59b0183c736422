"""The command ``fsdpcore trace``: dumps of the flight recorders, merged and explained."""
