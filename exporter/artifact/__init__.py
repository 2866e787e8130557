"""Write files: their form, their contents, and how they are published."""
