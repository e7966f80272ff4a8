"""Launchers for SSH, Slurm, Ray and Kubernetes, and pools of services that grow and shrink."""
