"""Pages, tables and pictures of finished work."""
