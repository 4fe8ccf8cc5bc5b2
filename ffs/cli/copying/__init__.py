"""Moving trees between this machine and clusters: sides, lanes, part files, the plan of a sync."""
