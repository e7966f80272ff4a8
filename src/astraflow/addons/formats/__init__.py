"""How the families of models write tool calls, and which format a chat template has."""
