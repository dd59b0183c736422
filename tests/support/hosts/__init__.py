"""Hosts of our own: network namespaces, joined by links that a test shapes, cuts and listens to.

``lab.Lab`` makes them, ``ranks.on_hosts`` runs a job on them; ``middle.Middle`` sits between two.
"""
