"""The command line: it reads words, shows reports, and leaves every decision to the rooms below."""
