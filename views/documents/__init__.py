"""Views of kind `documents`: declared parts, the steps that join them, and the same as one query to compare with."""
