"""Values and rules that servers and workers share. Pure: no clock, thread, socket, file, log or
random number.
"""
