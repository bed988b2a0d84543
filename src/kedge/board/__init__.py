"""A local page over a folder of runs, live while they train: ``kedge board DIR``.

::

    watch     the runs below the folder, read as they grow; server-sent events
    panel     curves of several runs, their comparison, what repeats or resumes a run
    guard     who may ask: host, token, origin, content policy
    app       the routes
    serve     the port and the process

None of them imports torch: the page is there at once, and runs belong to other processes.
"""
