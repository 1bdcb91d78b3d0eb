"""Further down."""
