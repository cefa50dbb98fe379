def main(): print("ours")
