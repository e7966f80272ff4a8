"""Environments that other systems define: Harbor, OpenEnv, AgentBench, the adapter protocol."""
