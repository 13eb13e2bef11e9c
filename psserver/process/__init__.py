"""What every part of a server process needs: configuration, identity, metrics, and the gRPC
server.
"""
