"""A local page over a folder of runs, live while they train: ``kedge board DIR``.

::

    files     reads files below the folder; follows no link
    tail      the metrics of a seed, as they are appended
    entry     one run: its settings, state, progress and notes
    catalogue all runs below the folder, found again when folders change
    compare   curves of several runs, and the table of paired differences
    commands  what repeats or resumes a run
    guard     who may ask: host, token, origin, content policy
    app       the routes; server-sent events
    serve     the port and the process

None of them imports torch: the page is there at once, and runs belong to other processes.
"""
