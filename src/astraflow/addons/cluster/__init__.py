"""Launchers for SSH, Slurm and Ray, and manifests for Kubernetes."""
