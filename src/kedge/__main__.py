"""``python -m kedge`` is the command ``kedge``."""

if __name__ == "__main__":
    import os
    import sys

    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]  # as for `kedge`: the folder may be a stranger's, with modules of any name
    from kedge.cli import main

    main()
