"""``sim``: the ranks are threads of this process."""
