"""Keyed tables that a view keeps between batches: immutable sorted runs of Arrow rows (docs/adr/0031-view-state.md)."""
