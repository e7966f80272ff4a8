"""Versions of weights on their way from a trainer to engines.

What is in a version, and is it intact?             manifest.py     build_manifest
Is a version stored in full or as a delta?          intake.py       take_over
From where does a service fetch a version?          receiver.py     Receiver
"""
