"""Views of kind `query`: a SELECT parsed and checked, compiled to steps, and computed as a whole to compare with."""
