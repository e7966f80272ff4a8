"""The OpenAI- and Anthropic-compatible endpoint through which agent programs reach the policies."""
