"""The commands, thin: parse first, import torch later, hand over to the part that does the work.

main.py has the program and what its exit codes mean; every other file is one command.
"""
