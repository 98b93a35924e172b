"""What the user holds: one constructor, and where the frames are made."""
