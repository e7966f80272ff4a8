"""Agent programs and foreign environments: a chat endpoint per episode, and hosts with their own Python."""
