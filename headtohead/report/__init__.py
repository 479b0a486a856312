"""Report pages and charts."""
