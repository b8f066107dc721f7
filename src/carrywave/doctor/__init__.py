"""`carrywave doctor`: examines this machine, or all machines of a launch, and says what is wrong and what to do."""
