"""Event time: durations, the clock of a view, windows. Every decision is a function of the log, never of a batch."""
