import com.rabbitmq.client.AMQP.BasicProperties;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.impl.ClientVersion;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;

/** The steps of this program are in ../script.py. */
public final class Client {
  private static final int FIRST = 50;
  private static final int SECOND = 5;
  private static final long PATIENCE = 60_000;

  private final Connection connection;
  private final Channel first;
  private final Channel other;
  private final List<String> received = new CopyOnWriteArrayList<>();
  private final List<Boolean> blocked = new CopyOnWriteArrayList<>();
  private int confirmed;

  private Client(String url) throws Exception {
    ConnectionFactory factory = new ConnectionFactory();
    factory.setUri(url);
    factory.setAutomaticRecoveryEnabled(false);
    connection = factory.newConnection();
    connection.addBlockedListener(reason -> blocked.add(true), () -> blocked.add(false));
    first = connection.createChannel();
    other = connection.createChannel();
    first.confirmSelect();
    first.queueDeclare("orders", false, false, false, null);
  }

  private void publish(int start, int stop) throws Exception {
    for (int number = start; number < stop; number++) {
      BasicProperties properties = new BasicProperties.Builder().messageId(Integer.toString(number)).build();
      byte[] body = String.format("%06d", number).getBytes(StandardCharsets.UTF_8);
      first.basicPublish("", "orders", true, properties, body);
      first.waitForConfirmsOrDie(PATIENCE);
      confirmed++;
    }
  }

  private void consume(int count) throws Exception {
    BlockingQueue<String> messages = new LinkedBlockingQueue<>();
    String tag = other.basicConsume("orders", false, (consumer, message) -> {
      other.basicAck(message.getEnvelope().getDeliveryTag(), false);
      String body = new String(message.getBody(), StandardCharsets.UTF_8);
      messages.add("[\"" + body + "\", \"" + message.getProperties().getMessageId() + "\"]");
    }, consumer -> { });
    for (; count > 0; count--) {
      String message = messages.poll(PATIENCE, TimeUnit.MILLISECONDS);
      if (message == null) {
        throw new IllegalStateException(count + " messages did not come");
      }
      received.add(message);
    }
    other.basicCancel(tag);
  }

  private void tell(String words) throws Exception {
    other.basicPublish("", "told", null, words.getBytes(StandardCharsets.UTF_8));
  }

  private void awaitGo() throws Exception {
    long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(PATIENCE);
    while (other.basicGet("go", true) == null) {
      if (System.nanoTime() > end) {
        throw new IllegalStateException("nobody said to go on");
      }
      Thread.sleep(10);
    }
  }

  private String run() throws Exception {
    publish(0, FIRST);
    consume(FIRST);
    for (String words : List.of("published", "blocked", "unblocked")) {
      tell(words);
      awaitGo();
    }
    AtomicReference<Exception> failure = new AtomicReference<>();
    Thread publisher = new Thread(() -> {
      try {
        publish(FIRST, FIRST + SECOND);
      } catch (Exception error) {
        failure.set(error);
      }
    });
    publisher.start();
    tell(isHeld(publisher) ? "held" : "went on");
    awaitGo();
    publisher.join(PATIENCE);
    if (failure.get() != null) {
      throw failure.get();
    }
    consume(SECOND);
    String request = "ok";
    try {
      first.queueDeclarePassive("orders");
    } catch (Exception error) {
      request = error.getClass().getSimpleName();
    }
    connection.close();
    return String.format(
        "{\"version\": \"%s\", \"confirmed\": %d, \"received\": %s, \"blocked\": %s, \"flow\": null, \"request\": \"%s\"}",
        ClientVersion.VERSION, confirmed, received, blocked, request);
  }

  /** Returns whether the thread waits in basicPublish, and not for a confirm. Returns false when it has ended. */
  private static boolean isHeld(Thread publisher) throws InterruptedException {
    while (publisher.isAlive()) {
      if (publisher.getState() == Thread.State.WAITING) {
        for (StackTraceElement element : publisher.getStackTrace()) {
          if (element.getMethodName().equals("basicPublish")) {
            return true;
          }
        }
      }
      Thread.sleep(10);
    }
    return false;
  }

  public static void main(String[] arguments) throws Exception {
    System.out.println(new Client(arguments[0]).run());
    // Do not wait for threads of the library.
    System.exit(0);
  }
}
