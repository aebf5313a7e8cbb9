"""Keyed tables that a view keeps between batches: immutable sorted runs of Arrow rows."""
