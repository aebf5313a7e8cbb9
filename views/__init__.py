"""Views: tables derived from captured tables, computed from the log batch by batch and appended to it as changes."""
