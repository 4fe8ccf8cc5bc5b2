"""Who may do what: the keys that sign capabilities, users and tokens. docs/control_plane.md."""
