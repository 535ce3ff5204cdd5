"""What the policy talks with: an environment class, tools, or an agent, in killable processes of the user's code."""
