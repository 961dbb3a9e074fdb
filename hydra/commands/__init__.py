"""What each command of the command line does. Imported by hydra/cli.py when the command runs, not before."""
