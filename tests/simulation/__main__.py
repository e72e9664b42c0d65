from tests.simulation.command import main

if __name__ == "__main__":
    main()
