"""The page that follows a running study."""
