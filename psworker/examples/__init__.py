"""Small trainings to run and to read: digits (a CNN), charlm (a transformer), linear (numpy
only).
"""
