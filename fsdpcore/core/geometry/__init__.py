"""Parts of arrays, as pure geometry: boxes, flat ranges, flat layouts, overlaps."""
