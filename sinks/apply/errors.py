"""Why an applier leaves a batch unfinished. Neither is a fault: the log keeps the changes."""


class Stopped(Exception):
    """The process is ending. The unfinished batch is applied again at the next start."""


class TableLost(Exception):
    """The store no longer has the rows that were written to this table. Its changes stay in the log."""
