"""Environments that other systems define: Harbor and OpenEnv."""
