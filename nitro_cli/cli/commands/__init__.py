"""One module a command; each has ``run(session) -> exit code`` and is imported only when it is called."""
