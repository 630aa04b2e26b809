"""`quintet route`: one door to servers on other machines."""
